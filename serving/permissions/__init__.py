"""Who may do what: names in certificates, and the rights that a file gives them."""
