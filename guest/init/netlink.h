/* Just enough rtnetlink: one request, one acknowledgement. */
#ifndef AENV_INIT_NETLINK_H
#define AENV_INIT_NETLINK_H

#include <linux/netlink.h>
#include <linux/rtnetlink.h>
#include <stddef.h>
#include <stdint.h>

struct request {
    struct nlmsghdr header;
    char body[512];
};

/* Start a request: `head` is the fixed part that follows the netlink header. */
void netlink_begin(struct request *request, uint16_t type, uint16_t flags, const void *head, size_t size);
void netlink_attribute(struct request *request, uint16_t type, const void *value, size_t size);
int netlink_open(void);
/* Returns 0, or -1 with the kernel's errno. */
int netlink_talk(int fd, struct request *request);

#endif
