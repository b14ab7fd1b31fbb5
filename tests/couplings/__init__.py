"""Programs that couple the rows of a batch, or seem to: exact, or refused before the update."""
