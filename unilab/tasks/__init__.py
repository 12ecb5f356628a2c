"""Task logic: declarative constants plus pure torch functions over named physics fields."""
