"""What reports say: advice, tables, pages."""
