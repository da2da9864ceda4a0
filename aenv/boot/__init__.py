"""Guest kernel and initramfs."""
