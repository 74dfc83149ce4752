"""Feature maps of whole regions, which are split over ranks."""
