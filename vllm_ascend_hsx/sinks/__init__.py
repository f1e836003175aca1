"""Where extracted rows go: the contract (base) and its implementations (file)."""
