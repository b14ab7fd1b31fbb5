"""Is a split call what the whole call would be?"""
