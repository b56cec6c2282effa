"""The runs of this process: decisions are committed, announced and kept as history."""
