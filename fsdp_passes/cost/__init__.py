"""What a schedule costs: hardware, times of steps, and the timeline that follows from them."""
