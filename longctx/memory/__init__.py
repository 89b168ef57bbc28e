"""What a rank holds, whether that fits, and what would make it fit."""
