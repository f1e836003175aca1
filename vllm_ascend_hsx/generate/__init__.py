"""`hsx generate`: a dataset and servers in, one file of hidden states per row out."""
