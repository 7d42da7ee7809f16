"""Virtual cards that several processes share: their jobs compete for memory as on a real GPU."""
