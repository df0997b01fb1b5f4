// on_device.h - makes the blocking calls of a test run on device memory when included before the
// test (-include). Each buffer is copied to a device, the call is made there, and the buffer is
// copied back. For tests only; see on_device.c.
#ifndef ON_DEVICE_H
#define ON_DEVICE_H
#ifdef ON_XLA
#include "idist_xla.h"
#else
#include "idist_nccl.h"
#endif

#ifdef __cplusplus
extern "C" {
#endif
idist_status on_device_all_reduce(const void *send, void *recv, size_t count, idist_dtype dtype,
                                  idist_op op, const idist_opts *opts);
idist_status on_device_reduce(const void *send, void *recv, size_t count, idist_dtype dtype,
                              idist_op op, int root, const idist_opts *opts);
idist_status on_device_broadcast(void *buf, size_t count, idist_dtype dtype, int root,
                                 const idist_opts *opts);
idist_status on_device_all_gather(const void *send, void *recv, size_t count, idist_dtype dtype,
                                  const idist_opts *opts);
idist_status on_device_gather(const void *send, void *recv, size_t count, idist_dtype dtype,
                              int root, const idist_opts *opts);
idist_status on_device_scatter(const void *send, void *recv, size_t count, idist_dtype dtype,
                               int root, const idist_opts *opts);
idist_status on_device_reduce_scatter(const void *send, void *recv, size_t count, idist_dtype dtype,
                                      idist_op op, const idist_opts *opts);
idist_status on_device_all_to_all(const void *send, void *recv, size_t count, idist_dtype dtype,
                                  const idist_opts *opts);
idist_status on_device_scan(const void *send, void *recv, size_t count, idist_dtype dtype,
                            idist_op op, const idist_opts *opts);
idist_status on_device_exscan(const void *send, void *recv, size_t count, idist_dtype dtype,
                              idist_op op, const idist_opts *opts);
idist_status on_device_all_gatherv(const void *send, size_t sendcount, void *recv,
                                   const size_t *recvcounts, const size_t *recvdispls,
                                   idist_dtype dtype, const idist_opts *opts);
idist_status on_device_gatherv(const void *send, size_t sendcount, void *recv,
                               const size_t *recvcounts, const size_t *recvdispls,
                               idist_dtype dtype, int root, const idist_opts *opts);
idist_status on_device_scatterv(const void *send, const size_t *sendcounts,
                                const size_t *senddispls, void *recv, size_t recvcount,
                                idist_dtype dtype, int root, const idist_opts *opts);
idist_status on_device_all_to_allv(const void *send, const size_t *sendcounts,
                                   const size_t *senddispls, void *recv, const size_t *recvcounts,
                                   const size_t *recvdispls, idist_dtype dtype,
                                   const idist_opts *opts);
idist_status on_device_reduce_scatterv(const void *send, void *recv, const size_t *recvcounts,
                                       idist_dtype dtype, idist_op op, const idist_opts *opts);
idist_status on_device_send(const void *buf, size_t count, idist_dtype dtype, int dst, int tag,
                            const idist_opts *opts);
idist_status on_device_recv(void *buf, size_t count, idist_dtype dtype, int src, int tag,
                            idist_recv_info *info, const idist_opts *opts);
#ifdef __cplusplus
}
#endif

#ifndef ON_DEVICE_C
#undef idist_all_gatherv
#undef idist_gatherv
#undef idist_scatterv
#undef idist_all_to_allv
#undef idist_reduce_scatterv
#define idist_all_reduce on_device_all_reduce
#define idist_reduce on_device_reduce
#define idist_broadcast on_device_broadcast
#define idist_all_gather on_device_all_gather
#define idist_gather on_device_gather
#define idist_scatter on_device_scatter
#define idist_reduce_scatter on_device_reduce_scatter
#define idist_all_to_all on_device_all_to_all
#define idist_scan on_device_scan
#define idist_exscan on_device_exscan
#define idist_all_gatherv on_device_all_gatherv
#define idist_gatherv on_device_gatherv
#define idist_scatterv on_device_scatterv
#define idist_all_to_allv on_device_all_to_allv
#define idist_reduce_scatterv on_device_reduce_scatterv
#define idist_send on_device_send
#define idist_recv on_device_recv
#endif
#endif
