"""Tests of profiles: what is recorded, how it is counted, and what is said."""
