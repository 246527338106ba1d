"""From processed requests to tokens, on one thread. It is handed an adapter and imports none."""
