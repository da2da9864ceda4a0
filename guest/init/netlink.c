#include "netlink.h"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

void netlink_begin(struct request *request, uint16_t type, uint16_t flags, const void *head, size_t size) {
    memset(request, 0, sizeof *request);
    request->header.nlmsg_type = type;
    request->header.nlmsg_flags = NLM_F_REQUEST | NLM_F_ACK | flags;
    request->header.nlmsg_len = NLMSG_LENGTH(size);
    memcpy(NLMSG_DATA(&request->header), head, size);
}

void netlink_attribute(struct request *request, uint16_t type, const void *value, size_t size) {
    size_t at = NLMSG_ALIGN(request->header.nlmsg_len);
    struct rtattr *attribute = (struct rtattr *)((char *)request + at);
    attribute->rta_type = type;
    attribute->rta_len = RTA_LENGTH(size);
    memcpy(RTA_DATA(attribute), value, size);
    request->header.nlmsg_len = at + RTA_ALIGN(attribute->rta_len);
}

int netlink_open(void) {
    return socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_ROUTE);
}

int netlink_talk(int fd, struct request *request) {
    char answer[1024] __attribute__((aligned(NLMSG_ALIGNTO)));
    if (send(fd, request, request->header.nlmsg_len, 0) < 0)
        return -1;
    ssize_t size = recv(fd, answer, sizeof answer, 0);
    if (size < 0)
        return -1;
    struct nlmsghdr *header = (struct nlmsghdr *)answer;
    if (!NLMSG_OK(header, size) || header->nlmsg_type != NLMSG_ERROR ||
        header->nlmsg_len < NLMSG_LENGTH(sizeof(struct nlmsgerr))) {
        errno = EPROTO;
        return -1;
    }
    int error = ((struct nlmsgerr *)NLMSG_DATA(header))->error;
    errno = -error;
    return error ? -1 : 0;
}
