// os/linux/segment.h: passing a file in memory to another process of this host
#pragma once

#include "os/segment.h"
#include "os/unwind.h"

IDIST__UNUSED static ptrdiff_t idist__os_segment_send(int sock, const void *buf, size_t nbytes,
                                                      int fd) {
    struct msghdr message;
    struct iovec part;
    ptrdiff_t sent;
    union {
        struct cmsghdr head;
        char bytes[CMSG_SPACE(sizeof(int))];
    } control;

    memset(&message, 0, sizeof message);
    memset(&control, 0, sizeof control);
    part.iov_base = (void *)(uintptr_t)buf;
    part.iov_len = nbytes;
    message.msg_iov = &part;
    message.msg_iovlen = 1;

    if (fd >= 0) {
        message.msg_control = control.bytes;
        message.msg_controllen = sizeof control.bytes;
        control.head.cmsg_level = SOL_SOCKET;
        control.head.cmsg_type = SCM_RIGHTS;
        control.head.cmsg_len = CMSG_LEN(sizeof(int));
        memcpy(CMSG_DATA(&control.head), &fd, sizeof fd);
    }

    do sent = IDIST__OS_CALL(sendmsg(sock, &message, MSG_NOSIGNAL));
    while (sent < 0 && errno == EINTR);

    return sent;
}

IDIST__UNUSED static ptrdiff_t idist__os_segment_receive(int sock, void *buf, size_t nbytes,
                                                         int *fd) {
    struct msghdr message;
    struct iovec part;
    ptrdiff_t received;
    union {
        struct cmsghdr head;
        char bytes[CMSG_SPACE(sizeof(int))];
    } control;

    *fd = -1;
    memset(&message, 0, sizeof message);
    part.iov_base = buf;
    part.iov_len = nbytes;
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control.bytes;
    message.msg_controllen = sizeof control.bytes;

    do received = IDIST__OS_CALL(recvmsg(sock, &message, MSG_CMSG_CLOEXEC));
    while (received < 0 && errno == EINTR);
    if (received > 0 && message.msg_controllen >= CMSG_LEN(sizeof(int)) &&
        control.head.cmsg_level == SOL_SOCKET && control.head.cmsg_type == SCM_RIGHTS)
        memcpy(fd, CMSG_DATA(&control.head), sizeof *fd);

    return received;
}

IDIST__UNUSED static size_t idist__os_segment_nbytes(int fd) {
    struct stat info;
    return fstat(fd, &info) == 0 && info.st_size > 0 ? (size_t)info.st_size : 0;
}

IDIST__UNUSED static uint64_t idist__os_segment_ram(void) {
    return (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE);
}
