"""timer_service."""
