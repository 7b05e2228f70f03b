"""DueMQ client."""
