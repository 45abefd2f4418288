"""What all other packages import: names, trees, ranks, variables and units."""
