"""The admin clients, asyncio and blocking, and what their answers say."""
