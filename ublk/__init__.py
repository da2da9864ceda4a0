"""The block server: overlaybd images over ublk and FUSE."""
