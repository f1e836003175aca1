"""What consumers use: wait for a request's rows, load them, find them, check them. Imports `protocol` and nothing else of ours."""
