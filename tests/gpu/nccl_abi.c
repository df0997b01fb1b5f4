// nccl_abi.c - compares the constants and sizes that idist_nccl.h assumes for NCCL with an nccl.h.
// This file compiles only if they agree.
#include <cuda_fp16.h>
// Old versions of nccl.h hide their BF16 unless cuda_bf16.h is included first.
#include <cuda_bf16.h>
#include <nccl.h>
#define IDIST_IMPLEMENTATION
#include "idist_nccl.h"

#define SAME(ours, theirs) _Static_assert((int)(ours) == (int)(theirs), #theirs)
SAME(IDIST__NCCL_OK, ncclSuccess);
SAME(IDIST__NCCL_CUDA_ERROR, ncclUnhandledCudaError);
SAME(IDIST__NCCL_INTERNAL_ERROR, ncclInternalError);
SAME(IDIST__NCCL_IN_PROGRESS, ncclInProgress);
SAME(IDIST__NCCL_U8, ncclUint8);
SAME(IDIST__NCCL_I32, ncclInt32);
SAME(IDIST__NCCL_SUM, ncclSum);
SAME(IDIST__NCCL_PROD, ncclProd);
SAME(IDIST__NCCL_MAX, ncclMax);
SAME(IDIST__NCCL_MIN, ncclMin);
SAME(IDIST__NCCL_AVG, ncclAvg);
SAME(1, ncclScalarHostImmediate);
SAME(sizeof(idist__nccl_id), sizeof(ncclUniqueId));
SAME(sizeof(int), sizeof(ncclResult_t));
SAME(sizeof(int), sizeof(ncclDataType_t));
SAME(sizeof(int), sizeof(ncclRedOp_t));
SAME(sizeof(int), sizeof(ncclScalarResidence_t));
SAME(sizeof(void *), sizeof(ncclComm_t));

#if NCCL_VERSION_CODE >= 22400
SAME(10, ncclFloat8e4m3);
SAME(11, ncclFloat8e5m2);
#endif

// Calls every function as idist calls it. The compiler reports an argument that a version of NCCL
// has added or removed.
static int calls(void *comm, void **made, int *number, cudaStream_t stream) {
    ncclComm_t c = (ncclComm_t)comm;
    ncclUniqueId id;
    ncclRedOp_t op = ncclSum;
    int x = ncclGetVersion(number) | ncclGetUniqueId(&id);
    x |= ncclGetErrorString(ncclSuccess) == ncclGetLastError(c);
    x |= ncclCommInitRankConfig((ncclComm_t *)made, 1, id, 0, NULL) | ncclCommFinalize(c) |
         ncclCommDestroy(c);
    x |= ncclCommAbort(c) | ncclCommGetAsyncError(c, (ncclResult_t *)number) |
         ncclCommCount(c, number);
    x |= ncclCommUserRank(c, number) | ncclCommCuDevice(c, number) | ncclRedOpDestroy(op, c);
    x |= ncclRedOpCreatePreMulSum(&op, number, ncclFloat32, ncclScalarHostImmediate, c);
    x |= ncclGroupStart() | ncclGroupEnd() |
         ncclAllReduce(made, made, 1, ncclFloat32, op, c, stream);
    x |= ncclReduce(made, made, 1, ncclFloat32, op, 0, c, stream) |
         ncclBroadcast(made, made, 1, ncclInt8, 0, c, stream);
    x |= ncclAllGather(made, made, 1, ncclInt8, c, stream) |
         ncclReduceScatter(made, made, 1, ncclInt8, op, c, stream);
    return x | (int)ncclSend(made, 1, ncclInt8, 0, c, stream) |
           (int)ncclRecv(made, 1, ncclInt8, 0, c, stream);
}

int main(int argc, char **argv) {
    static const ncclDataType_t want[] = {ncclInt8,           ncclUint8,         (ncclDataType_t)-1,
                                          (ncclDataType_t)-1, ncclInt32,         ncclUint32,
                                          ncclInt64,          ncclUint64,        ncclFloat16,
                                          (ncclDataType_t)9,  ncclFloat32,       ncclFloat64,
                                          (ncclDataType_t)10, (ncclDataType_t)11};
    (void)argv;
    for (int i = 0; i <= IDIST_F8E5M2; i++)
        if (idist__nccl_issue_type((idist_dtype)i) != (int)want[i]) return 1;
    if (idist__nccl_issue_type(IDIST_F32_I64) != -1) return 1;
    return argc > 100 ? calls(NULL, NULL, NULL, NULL) : 0;
}
