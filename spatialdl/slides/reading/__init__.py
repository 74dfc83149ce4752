"""Reading pixels of slides: any box at any resolution."""
