"""Text for users who meet an error of torch's, or a slow arrangement: what fsdp2 knows of the cause, and the fix."""
