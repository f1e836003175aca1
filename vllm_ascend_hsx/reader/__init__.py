"""The consumers' side: wait for, load, find and check files. Imports only `protocol`."""
