"""Third-party style training loops without any Rankscope code."""
