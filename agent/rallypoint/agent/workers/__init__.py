"""The workers of a round: environment, placement, start, signals and end."""
