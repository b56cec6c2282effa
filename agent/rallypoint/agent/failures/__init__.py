"""Why a worker died."""
