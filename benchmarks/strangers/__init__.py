"""Training loops as their communities write them, which know nothing of Rankscope."""
