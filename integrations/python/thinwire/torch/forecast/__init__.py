"""What a step would take: notes of its computing, a probe of the link, and the choice."""
