"""A comparison as one HTML page that explains itself."""
