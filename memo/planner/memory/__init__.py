"""Addresses for memory requests that are known beforehand (MEMO paper, section 4.2): offline dynamic storage
allocation, for one problem (`solve`) and for an iteration in two levels (`plan`)."""
