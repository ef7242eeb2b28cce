"""Modules that compress caches; they load without Lightning."""
