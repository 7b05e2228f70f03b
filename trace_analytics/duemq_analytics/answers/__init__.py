"""DataFrame to DataFrame: what the traces tell."""
