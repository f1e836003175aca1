"""For the tools of others that consume hidden states; each module needs its tool, and nothing here is imported without being asked for."""
