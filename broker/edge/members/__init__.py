"""Members of groups over their Join streams: `sessions`, their `messages`, and `telling` them."""
