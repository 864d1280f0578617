"""Moving bytes: streams, collectives, communicators that the user brings, process groups."""
