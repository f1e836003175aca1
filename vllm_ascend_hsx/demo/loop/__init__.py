"""`hsx demo --loop`: train a target, extract its rows, train drafts on them, serve the drafts."""
