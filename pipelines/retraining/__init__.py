"""The loop from captured traffic to the next version: triggers, the retraining, and the comparison with the champion."""
