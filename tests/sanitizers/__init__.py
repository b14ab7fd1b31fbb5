"""Both extensions and the core under AddressSanitizer, UBSan, LeakSanitizer and ThreadSanitizer.

Each tool has to find defects that are planted on purpose (plants.c) before its silence counts.
"""
