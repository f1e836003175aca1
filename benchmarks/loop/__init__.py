"""Train a target, extract rows, train drafts on the rows and serve the drafts."""
