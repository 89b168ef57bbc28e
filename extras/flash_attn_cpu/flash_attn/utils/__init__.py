"""What of flash_attn.utils rings of sequences use."""
