"""What ranks agree on before they communicate: steps that all take or none, and work that some have less of than others."""
