"""Train a target, extract its rows, train drafts on them and serve the drafts."""
