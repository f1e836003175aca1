"""References for the recurrent layers of hybrid targets."""
