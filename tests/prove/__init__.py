"""`make prove`: every suite of faults in full, in two processes, with one table at the end."""
