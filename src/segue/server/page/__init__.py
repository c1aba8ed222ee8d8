"""The page at `/`: plain files, nothing to build and nothing from elsewhere, and what its view of the engine shows."""
