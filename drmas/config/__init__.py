"""Configuration: the models (`schema`) and how files and overrides become one of them (`load`)."""
