"""`hsx generate`: a dataset and servers in, one file of hidden states per row out.

Decisions

* Each request names the file of the row, so the file alone decides whether a row is finished. It
  is checked before the request and after the answer. A killed run is continued without sending
  again.
* Only the server knows the tokens of a text. The file of a text also needs a line of the ledger
  with the checksum.
* The ledger refuses another dataset, other options, or other weights, and an flock refuses a
  second run. A run that divides the rows into another number of ranks is refused while the lock
  of the earlier division is held.
* A server gets one request at a time until the first row has arrived, so a wrong server costs few
  rows.
* A name that exists is refused by the server, so a wrong file is removed before it is asked for
  again.
"""
