"""Jobs: many rows from files and tables in, their answers out, resumable."""
