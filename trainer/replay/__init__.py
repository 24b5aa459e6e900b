"""A step once more, with every operation looked at: does what went wrong come back, and where does it begin?"""
