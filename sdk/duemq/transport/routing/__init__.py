"""Who is where, as nameservers push it, and what is found at an address where none answers."""
